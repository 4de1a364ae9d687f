"""How curved the loss is: eigenvalues of the Hessian and its kin, and the learning rate they allow."""
