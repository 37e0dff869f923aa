"""The source papers' tables: control tasks and regression; no training run imports this."""
