/*
 * loaders opencl|vulkan|layers|egl...
 *
 * Has a loader of the image look for drivers, as each program that uses it does. What it loads is
 * seen with LD_DEBUG=files; "layers" prints the names of Vulkan's. 3 if a loader is missing.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void *find(const char *library, const char *name)
{
	void *loader = dlopen(library, RTLD_NOW);

	return loader ? dlsym(loader, name) : NULL;
}

int main(int argc, char **argv)
{
	uint32_t count = 0;

	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "opencl")) {
			int (*platforms)(uint32_t, void *, uint32_t *) =
				find("libOpenCL.so.1", "clGetPlatformIDs");

			if (!platforms)
				return 3;
			platforms(0, NULL, &count);
		} else if (!strcmp(argv[i], "vulkan")) {
			int (*extensions)(const char *, uint32_t *, void *) =
				find("libvulkan.so.1", "vkEnumerateInstanceExtensionProperties");

			if (!extensions)
				return 3;
			extensions(NULL, &count, NULL);
		} else if (!strcmp(argv[i], "layers")) {
			struct {
				char name[256];
				uint32_t versions[2];
				char description[256];
			} found[16]; /* VkLayerProperties */
			int (*layers)(uint32_t *, void *) =
				find("libvulkan.so.1", "vkEnumerateInstanceLayerProperties");

			if (!layers)
				return 3;
			count = sizeof(found) / sizeof(found[0]);
			layers(&count, found);
			for (uint32_t n = 0; n < count; n++)
				puts(found[n].name);
		} else if (!strcmp(argv[i], "egl")) {
			enum { EXTENSIONS = 0x3055 };
			const char *(*query)(void *, int) = find("libEGL.so.1", "eglQueryString");

			if (!query)
				return 3;
			query(NULL, EXTENSIONS);
		}
	}
	return 0;
}
