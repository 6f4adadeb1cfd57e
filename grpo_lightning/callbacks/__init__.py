"""Whatever a run can do without: each callback reads what the steps return and changes no result."""
