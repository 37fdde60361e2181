"""Tables and plots of prefill: layers, steps, targets, echo."""
