"""Tables and checks of the source papers (extra ``papers``), never loaded by ``dprlhf train``."""
