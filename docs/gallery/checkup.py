"""Something is wrong: what? findings of the doctor, ranked by measured effect."""

import normgauge as ng

model, batch, optimizer = ng.doctor.sick_model()  # a network with five faults
result = ng.checkup(model, batch, optimizer=optimizer)
