"""State dicts of models (model/) and optimizers (optim/), and what both share.

parts.py has the part of each parameter that this rank holds, exchange.py moves parts
between ranks, forms.py puts them into state dicts and takes them out, for models and
optimizers alike, and sharded_tensors.py makes the tensors of sharded ones.
"""
