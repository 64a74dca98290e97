"""Teachers that servers answer for: what they are asked, and rows of what they say (methods.md §13)."""
