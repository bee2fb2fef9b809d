"""From a module and the constructor's arguments to a unit, and the unit's facts."""
