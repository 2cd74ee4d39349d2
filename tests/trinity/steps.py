"""How many steps the program trains, where no process of it is."""

STEPS = 4
