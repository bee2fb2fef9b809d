"""Plans the training of a model: memory, bytes and time of one rank.

``python -m fsdp_c plan --model ... --world-size ...`` prints it; :func:`plan_model`
returns it. Nothing is allocated on a device, no process group is needed. See
docs/guide/plan.md.
"""

from fsdp_c.tools.plan._errors import PlanError
from fsdp_c.tools.plan._model_plan import ModelPlan, Sharding, Suggestion, plan_model
from fsdp_c.tools.plan._models import ModelSource, find_model
from fsdp_c.tools.plan._plan import Collective, Link, RankPlan, Settings, UnitPlan
from fsdp_c.tools.plan._whole import WholeStep

__all__ = [
    "Collective",
    "Link",
    "ModelPlan",
    "ModelSource",
    "PlanError",
    "RankPlan",
    "Settings",
    "Sharding",
    "Suggestion",
    "UnitPlan",
    "WholeStep",
    "find_model",
    "plan_model",
]
