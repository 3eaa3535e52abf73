"""Events as lines, files and messages to the operator."""
