"""How a training is split over ranks: one file an axis, and what is exchanged along it."""
