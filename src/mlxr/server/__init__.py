"""HTTP: routes and renderers of every dialect over the events of `service`. No model code."""
