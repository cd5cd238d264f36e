"""Functions whose bits depend on the operands alone: on no compiler, instruction set or thread.

A single operation of IEEE 754 (a sum, a product, a quotient, a root) is rounded in one way. Three
things let bits differ nevertheless, and each has its remedy here:

- a compiler contracts a product and a sum into one operation, which rounds once: `apart`
- sums of many numbers are taken in some order: `sums` has one, `products` are exact in any
- libraries approximate other functions: `elementary` makes them of single operations

The rules define a number for each operation; whatever computes this number may be used.
"""
