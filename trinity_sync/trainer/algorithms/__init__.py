"""The options of `algorithm`: the data of a step, the loss and the checks of the config."""
