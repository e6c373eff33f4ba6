"""Plans and their execution. Knows contracts and layout, neither formats nor the store."""
