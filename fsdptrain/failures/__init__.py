"""Why a run failed: any exception becomes an FsdptrainError; a hang and lost nodes are noticed and explained."""
