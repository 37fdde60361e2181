"""The former name of `kvjax.cost_model`."""

raise ImportError("kvjax.bill is kvjax.cost_model now: a Bill is a CostModel, known_bill is known_cost_model (docs/cost-model.md)")
