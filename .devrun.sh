set -x
nproc; date
cmake --preset cuda -DCMAKE_UNITY_BUILD=ON -DTorch_DIR=$(python3 cmake/python_torch_dir.py) -DLOCKSTEP_XXHASH_INCLUDE_DIR=$PWD/.xxh > /tmp/cmake.log 2>&1 || tail -20 /tmp/cmake.log
timeout 560 ninja -C build/cuda -j16 -k 0 > /tmp/ninja.log 2>&1; echo rc $?
grep -E "FAILED|error:" /tmp/ninja.log | head -40
tail -2 /tmp/ninja.log; date
