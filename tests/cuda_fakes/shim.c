/* Preloaded beside a CUDA build of torch on a machine without a GPU: autograd asks whether each GPU has a context. */
signed char gpus = 0; /* set to more than torch asks for once fake tensors have replaced the guard of the devices */
signed char _ZN3c104cuda12device_countEv(void) { return gpus; } /* c10::cuda::device_count */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = *active = 0; }
