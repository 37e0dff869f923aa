"""What privacy buys: tasks in which private prompts matter, against public prompts alone."""
