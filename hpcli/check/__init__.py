"""check-norm: a matrix of layouts, an independent reference, a verdict, and the cause where one fails."""
