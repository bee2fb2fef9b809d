"""State dicts of models (model/) and optimizers (optim/), and what both share.

parts.py says which part of each parameter this rank holds, exchange.py moves parts
between ranks, sharded_tensors.py is the form that they have in sharded state dicts.
"""
