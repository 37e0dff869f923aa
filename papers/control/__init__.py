"""The papers' control, dosing and bandit tasks: a user is one trajectory."""
