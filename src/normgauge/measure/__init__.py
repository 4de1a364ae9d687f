"""Named quantities of an Objective, each with its kind, cost and status: one folder per question."""
