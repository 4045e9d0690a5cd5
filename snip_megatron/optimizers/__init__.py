"""How far an optimizer moves the weights in answer to a gradient and to an error of it."""
