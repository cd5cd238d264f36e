"""Tables that are checked as they are read: strict, frozen, and explained in one line."""
