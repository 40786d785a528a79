"""Services beside the training; a script imports one where a flag asks for it, and none of them
imports a script."""
