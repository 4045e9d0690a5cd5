"""The update that an optimizer makes from a gradient, and its change by an error of the gradient."""
