"""The Program: who does what, in what order, with what work; and the steps that make one."""
