"""The policy that is trained: a language model with an adapter, and its optimizer."""
