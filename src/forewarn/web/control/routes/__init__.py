"""The routes of the control API, one file per resource."""
