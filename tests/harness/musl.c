/*
 * musl
 *
 * Prints the UUID of each GPU that the driver's NVML has, which musl's loader finds by its soname.
 * 3 if it is not found; the reason is on stderr.
 */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	int (*init)(void), (*count)(unsigned *), (*device)(unsigned, void **);
	int (*uuid)(void *, char *, unsigned);
	unsigned gpus = 0;

	if (!nvml) {
		fprintf(stderr, "%s\n", dlerror());
		return 3;
	}
	init = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
	count = (int (*)(unsigned *))dlsym(nvml, "nvmlDeviceGetCount_v2");
	device = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
	uuid = (int (*)(void *, char *, unsigned))dlsym(nvml, "nvmlDeviceGetUUID");
	if (init() || count(&gpus))
		return 1;
	for (unsigned i = 0; i < gpus; i++) {
		char text[96];
		void *gpu;

		if (device(i, &gpu) || uuid(gpu, text, sizeof(text)))
			return 1;
		puts(text);
	}
	return 0;
}
