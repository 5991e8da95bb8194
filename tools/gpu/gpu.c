/*
 * Check what works on a GPU. It loads the driver as applications do.
 *
 *   gpu cuda     each device of CUDA: its name and UUID, and whether a kernel computes on it
 *   gpu decode   whether the first device decodes H.264
 *   gpu encode   the newest version of the encoder's interface
 *   gpu egl      the devices of EGL, and the vendor of each
 *   gpu vulkan   the devices of Vulkan
 *
 * It prints a JSON object on each line: one about the driver, then one for each device. It exits
 * with 0; with 1 if a call failed (the last line's "failed" names it, "code" is its result); with 2
 * if its arguments are wrong; with 3 if a library did not load ("failed", "reason").
 *
 * It needs no headers of NVIDIA's or Khronos': it declares what it uses of their stable ABI.
 *
 * Source: CUDA Driver API; PTX ISA; Vulkan 1.0; EGL 1.5, EXT_device_enumeration.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Not a multiple of a block, so that the bound in the kernel matters. */
#define COUNT 100003
#define BLOCK 256
#define LOG_SIZE 4096

/* out[i] = in[i] * in[i] + i, modulo 2^32. */
static const char KERNEL[] =
	".address_size 64\n"
	".visible .entry mix(.param .u64 out, .param .u64 in, .param .u32 count)\n"
	"{\n"
	"	.reg .pred %outside;\n"
	"	.reg .b32 %i, %block, %width, %thread, %count, %x, %y;\n"
	"	.reg .b64 %out, %in, %offset;\n"
	"	mov.u32 %block, %ctaid.x;\n"
	"	mov.u32 %width, %ntid.x;\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	mad.lo.u32 %i, %block, %width, %thread;\n"
	"	ld.param.u32 %count, [count];\n"
	"	setp.ge.u32 %outside, %i, %count;\n"
	"	@%outside bra DONE;\n"
	"	ld.param.u64 %in, [in];\n"
	"	ld.param.u64 %out, [out];\n"
	"	cvta.to.global.u64 %in, %in;\n"
	"	cvta.to.global.u64 %out, %out;\n"
	"	mul.wide.u32 %offset, %i, 4;\n"
	"	add.u64 %in, %in, %offset;\n"
	"	add.u64 %out, %out, %offset;\n"
	"	ld.global.u32 %x, [%in];\n"
	"	mad.lo.u32 %y, %x, %x, %i;\n"
	"	st.global.u32 [%out], %y;\n"
	"DONE:\n"
	"	ret;\n"
	"}\n";

/* The second is for a driver that no longer supports Maxwell. */
static const char *const TARGETS[] = {
	".version 6.0\n.target sm_50\n",
	".version 6.3\n.target sm_75\n",
	NULL,
};

/* CU_JIT_ERROR_LOG_BUFFER and its size */
enum { ERROR_LOG = 5, ERROR_LOG_SIZE = 6 };

static void print_text(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		unsigned char c = *text;

		if (c == '"' || c == '\\')
			printf("\\%c", c);
		else if (c < ' ' || c > '~')
			printf("\\u%04x", c);
		else
			putchar(c);
	}
	putchar('"');
}

static void fail(const char *call, long code, const char *name)
{
	printf("{\"failed\": ");
	print_text(call);
	printf(", \"code\": %ld, \"name\": ", code);
	print_text(name ? name : "");
	printf("}\n");
	exit(1);
}

static void *load(const char *name)
{
	void *library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
	const char *reason = library ? "" : dlerror();

	if (!library) {
		printf("{\"failed\": \"dlopen %s\", \"reason\": ", name);
		print_text(reason);
		printf("}\n");
		exit(3);
	}
	return library;
}

static void *find(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (!found) {
		printf("{\"failed\": \"dlsym %s\", \"reason\": ", name);
		print_text(dlerror());
		printf("}\n");
		exit(3);
	}
	return found;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

/* --- CUDA ----------------------------------------------------------------------------- */

static void *cuda_library;

static void cuda_check(const char *call, int code)
{
	int (*name_of)(int, const char **) = dlsym(cuda_library, "cuGetErrorName");
	const char *name = NULL;

	if (code == 0)
		return;
	if (name_of)
		name_of(code, &name);
	fail(call, code, name);
}

#define CUDA(name, types, ...) \
	cuda_check(#name, ((int (*) types)find(cuda_library, #name))(__VA_ARGS__))

static void cuda_start(void)
{
	cuda_library = load("libcuda.so.1");
	CUDA(cuInit, (unsigned int), 0);
}

static void cuda_context(int device)
{
	void *context;

	CUDA(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
	CUDA(cuCtxSetCurrent, (void *), context);
}

static void *cuda_module(const char **target)
{
	static char text[sizeof KERNEL + 64], log[LOG_SIZE];
	int options[] = {ERROR_LOG, ERROR_LOG_SIZE};
	int (*load_data)(void **, const void *, unsigned int, int *, void **) =
		find(cuda_library, "cuModuleLoadDataEx");
	void *module;
	int code = 0;

	for (int i = 0; TARGETS[i]; i++) {
		void *values[] = {log, (void *)(uintptr_t)sizeof log};

		*target = TARGETS[i];
		snprintf(text, sizeof text, "%s%s", TARGETS[i], KERNEL);
		code = load_data(&module, text, 2, options, values);
		if (code == 0)
			return module;
	}
	fail(log[0] ? log : "cuModuleLoadDataEx", code, "the kernel's PTX was refused");
	return NULL;
}

static void cuda_device(int index)
{
	static uint32_t in[COUNT], out[COUNT];
	const char *target;
	char name[256] = "";
	unsigned char uuid[16];
	uint32_t count = COUNT;
	uint64_t memory_in, memory_out;
	void *arguments[] = {&memory_out, &memory_in, &count};
	void *module, *function;
	double began, context, jit, run;
	size_t memory = 0;
	int device, wrong = 0;

	CUDA(cuDeviceGet, (int *, int), &device, index);
	CUDA(cuDeviceGetName, (char *, int, int), name, sizeof name, device);
	CUDA(cuDeviceGetUuid_v2, (unsigned char *, int), uuid, device);
	CUDA(cuDeviceTotalMem_v2, (size_t *, int), &memory, device);
	began = now();
	cuda_context(device);
	context = now();
	module = cuda_module(&target);
	CUDA(cuModuleGetFunction, (void **, void *, const char *), &function, module, "mix");
	jit = now();
	for (uint32_t i = 0; i < COUNT; i++)
		in[i] = i * 2654435761u + index;
	CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &memory_in, sizeof in);
	CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &memory_out, sizeof out);
	CUDA(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), memory_in, in, sizeof in);
	CUDA(cuLaunchKernel,
	     (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
	      void **, void **),
	     function, (COUNT + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, NULL, arguments, NULL);
	CUDA(cuCtxSynchronize, (void));
	CUDA(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), out, memory_out, sizeof out);
	run = now();
	for (uint32_t i = 0; i < COUNT; i++)
		wrong += out[i] != in[i] * in[i] + i;
	CUDA(cuMemFree_v2, (uint64_t), memory_in);
	CUDA(cuMemFree_v2, (uint64_t), memory_out);
	CUDA(cuModuleUnload, (void *), module);
	CUDA(cuDevicePrimaryCtxRelease_v2, (int), device);

	printf("{\"name\": ");
	print_text(name);
	printf(", \"uuid\": \"");
	for (int i = 0; i < 16; i++)
		printf(i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
	printf("\", \"memory\": %zu, \"wrong\": %d, \"of\": %d, \"target\": \"%.5s\", ", memory, wrong,
	       COUNT, strstr(target, "sm_"));
	printf("\"milliseconds\": {\"context\": %.1f, \"compile\": %.1f, \"run\": %.1f}}\n",
	       context - began, jit - context, run - jit);
}

static int cuda(void)
{
	int count = 0, version = 0;

	cuda_start();
	CUDA(cuDriverGetVersion, (int *), &version);
	CUDA(cuDeviceGetCount, (int *), &count);
	printf("{\"version\": %d, \"count\": %d}\n", version, count);
	for (int i = 0; i < count; i++)
		cuda_device(i);
	return 0;
}

/* --- Video ---------------------------------------------------------------------------- */

/* CUVIDDECODECAPS, only the fields that are used here; the rest stays zero. */
struct decode_caps {
	int codec, chroma;
	unsigned int depth_minus_8, reserved[3];
	unsigned char supported, engines;
	unsigned short formats;
	unsigned int width, height, macroblocks;
	unsigned char rest[256];
};

static int decode(void)
{
	enum { H264 = 4, YUV420 = 1 };
	struct decode_caps caps = {.codec = H264, .chroma = YUV420};
	void *video;
	int device, code;

	cuda_start();
	CUDA(cuDeviceGet, (int *, int), &device, 0);
	cuda_context(device);
	video = load("libnvcuvid.so.1");
	code = ((int (*)(struct decode_caps *))find(video, "cuvidGetDecoderCaps"))(&caps);
	if (code)
		fail("cuvidGetDecoderCaps", code, "");
	printf("{\"h264\": %s, \"width\": %u, \"height\": %u}\n", caps.supported ? "true" : "false",
	       caps.width, caps.height);
	return 0;
}

static int encode(void)
{
	void *video = load("libnvidia-encode.so.1");
	uint32_t version = 0;
	int code = ((int (*)(uint32_t *))find(video, "NvEncodeAPIGetMaxSupportedVersion"))(&version);

	if (code)
		fail("NvEncodeAPIGetMaxSupportedVersion", code, "");
	printf("{\"interface\": \"%u.%u\"}\n", version >> 4, version & 15);
	return 0;
}

/* --- Graphics ------------------------------------------------------------------------- */

#define MOST_DEVICES 64

static int egl(void)
{
	enum { PLATFORM_DEVICE = 0x313f, VENDOR = 0x3053, VERSION = 0x3054 };
	void *library = load("libEGL.so.1");
	void *(*address_of)(const char *) = find(library, "eglGetProcAddress");
	unsigned int (*initialize)(void *, int *, int *) = find(library, "eglInitialize");
	const char *(*query)(void *, int) = find(library, "eglQueryString");
	unsigned int (*devices_of)(int, void **, int *) = address_of("eglQueryDevicesEXT");
	void *(*display_of)(unsigned int, void *, const int *) = address_of("eglGetPlatformDisplayEXT");
	void *devices[MOST_DEVICES];
	int count = 0;

	if (!devices_of || !display_of || !devices_of(MOST_DEVICES, devices, &count))
		fail("eglQueryDevicesEXT", 0, "no EGL device");
	printf("{\"count\": %d}\n", count);
	for (int i = 0; i < count; i++) {
		void *display = display_of(PLATFORM_DEVICE, devices[i], NULL);
		int major, minor;
		const char *vendor = NULL, *version = NULL;

		if (display && initialize(display, &major, &minor)) {
			vendor = query(display, VENDOR);
			version = query(display, VERSION);
		}
		printf("{\"vendor\": ");
		print_text(vendor ? vendor : "");
		printf(", \"version\": ");
		print_text(version ? version : "");
		printf("}\n");
	}
	return 0;
}

/* VkInstanceCreateInfo */
struct instance_info {
	int type;
	const void *next;
	uint32_t flags;
	const void *application;
	uint32_t layer_count;
	const char *const *layers;
	uint32_t extension_count;
	const char *const *extensions;
};

/* VkPhysicalDeviceProperties, whose limits are not used here. */
struct device_properties {
	uint32_t api, driver, vendor, device, type;
	char name[256];
	unsigned char rest[2048];
};

static int vulkan(void)
{
	enum { INSTANCE_CREATE_INFO = 1 };
	void *library = load("libvulkan.so.1");
	int (*create)(const struct instance_info *, const void *, void **) =
		find(library, "vkCreateInstance");
	int (*enumerate)(void *, uint32_t *, void **) = find(library, "vkEnumeratePhysicalDevices");
	void (*properties_of)(void *, struct device_properties *) =
		find(library, "vkGetPhysicalDeviceProperties");
	struct instance_info info = {.type = INSTANCE_CREATE_INFO};
	static struct device_properties properties;
	void *instance, *devices[MOST_DEVICES];
	uint32_t count = MOST_DEVICES;
	int code = create(&info, NULL, &instance);

	if (code)
		fail("vkCreateInstance", code, "");
	code = enumerate(instance, &count, devices);
	if (code)
		fail("vkEnumeratePhysicalDevices", code, "");
	printf("{\"count\": %u}\n", count);
	for (uint32_t i = 0; i < count; i++) {
		properties_of(devices[i], &properties);
		printf("{\"vendor\": %u, \"name\": ", properties.vendor);
		print_text(properties.name);
		printf(", \"api\": \"%u.%u\"}\n", properties.api >> 22, properties.api >> 12 & 0x3ff);
	}
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(void);
	} commands[] = {
		{"cuda", cuda}, {"decode", decode}, {"encode", encode}, {"egl", egl}, {"vulkan", vulkan},
	};

	/* What a library prints must not come between the lines; what we have said must come out
	 * even if one of them crashes. */
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; argc == 2 && i < sizeof commands / sizeof *commands; i++)
		if (!strcmp(argv[1], commands[i].name))
			return commands[i].run();
	fputs("usage: gpu cuda|decode|encode|egl|vulkan\n", stderr);
	return 2;
}
