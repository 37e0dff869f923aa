"""The models that are trained: causal language models, adapters and classifiers."""
