"""Operations on NumPy arrays; the module of the same name one level up documents them."""
