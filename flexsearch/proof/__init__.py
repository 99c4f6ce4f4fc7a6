"""Floor 3: what can be proved about plans: lower bounds, and the optimum of a finite space. Off every hot path."""
