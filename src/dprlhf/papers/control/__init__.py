"""Tabular, control and dosing tasks: a user is one trajectory, the oracles are the same."""
