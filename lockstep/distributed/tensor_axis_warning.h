// A word on what a tensor axis costs where it is not inside a host.
#pragma once

#include <c10/core/Device.h>

#include <lockstep/mesh/device_mesh.h>

namespace lockstep {

// Where the ranks of a group along "tp" are on several hosts, one rank of the job warns, with how
// long these take for a sum. Every rank calls it; `host` is the number of its own, `device` its
// tensors are on.
void warn_of_tensor_axis_across_hosts(const mesh::DeviceMesh& mesh, int host, c10::Device device);

}  // namespace lockstep
