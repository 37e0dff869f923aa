"""The tables of the two source papers, run from a clone: control tasks and regression."""
