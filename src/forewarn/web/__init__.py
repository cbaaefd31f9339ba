"""HTTP: what a VM may call and what an operator may call."""
