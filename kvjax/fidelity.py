"""The former name of `kvjax.evaluation`."""

raise ImportError(
    "kvjax.fidelity is kvjax.evaluation now: panel is run, forcing is teacher_forcing, echo is prompt_recall (docs/evaluation.md)"
)
