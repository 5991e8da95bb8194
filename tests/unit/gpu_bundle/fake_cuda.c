/*
 * As much of the CUDA driver's interface as tools/gpu/gpu.c uses, on the processor.
 *
 * FAKE_DEVICES says how many devices there are (1), FAKE_FAULT what goes wrong: "old" (code for
 * sm_50 is refused), "ptx" (all is), "wrong" (one result is).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fault(const char *name)
{
	const char *set = getenv("FAKE_FAULT");

	return set && !strcmp(set, name);
}

int cuInit(unsigned int flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count)
{
	*count = getenv("FAKE_DEVICES") ? atoi(getenv("FAKE_DEVICES")) : 1;
	return *count ? 0 : 100;
}
int cuGetErrorName(int code, const char **name)
{
	*name = code == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_NO_DEVICE";
	return 0;
}
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device)
{
	snprintf(name, size, "Fake \"%d\"", device);
	return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
	memset(uuid, 0x11 * (device + 1), 16);
	return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ull << 30; return device < 0; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{
	*context = malloc(1);
	return device < 0;
}
int cuCtxSetCurrent(void *context) { return !context; }
int cuModuleLoadDataEx(void **module, const void *text, unsigned int count, int *options,
		       void **values)
{
	if (fault("ptx") || (fault("old") && strstr(text, ".target sm_50"))) {
		for (unsigned int i = 0; i < count; i++)
			if (options[i] == 5)
				strcpy(values[i], "ptxas: no code for this target");
		return 218;
	}
	*module = malloc(1);
	return !strstr(text, ".entry mix(");
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
	*function = module;
	return strcmp(name, "mix") != 0;
}
int cuMemAlloc_v2(uint64_t *memory, size_t size)
{
	*memory = (uintptr_t)malloc(size);
	return 0;
}
int cuMemFree_v2(uint64_t memory) { free((void *)(uintptr_t)memory); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
	memcpy((void *)(uintptr_t)to, from, size);
	return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
	memcpy(to, (void *)(uintptr_t)from, size);
	return 0;
}
int cuLaunchKernel(void *function, unsigned int x, unsigned int y, unsigned int z, unsigned int width,
		   unsigned int height, unsigned int depth, unsigned int shared, void *stream,
		   void **arguments, void **extra)
{
	uint32_t *out = *(uint32_t **)arguments[0], *in = *(uint32_t **)arguments[1];
	uint32_t count = *(uint32_t *)arguments[2];

	if (!function || y != 1 || z != 1 || height != 1 || depth != 1 || shared || stream || extra)
		return 1;
	for (uint32_t i = 0; i < x * width && i < count; i++)
		out[i] = in[i] * in[i] + i;
	out[count / 2] += fault("wrong");
	return 0;
}
int cuCtxSynchronize(void) { return 0; }
int cuModuleUnload(void *module) { free(module); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device < 0; }
