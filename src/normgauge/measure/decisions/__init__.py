"""How sure the decisions are: margins, perturbed inputs, data that have drifted."""
