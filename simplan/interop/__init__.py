"""Models and plans in other tools' formats."""
