"""Tables and figures, made only from the records that runs have written."""
