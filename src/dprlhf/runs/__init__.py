"""The folder that a run leaves: checkpoint, privacy card, report and publishing."""
