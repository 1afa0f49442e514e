"""One module for every known fault. They import no framework before they are planted."""
