"""How the values of all peers become one: by their mean, or by a rule that tolerates liars."""
