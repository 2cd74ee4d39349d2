"""What an option of `algorithm` names: where the data of a step comes from, and what is made of it."""
