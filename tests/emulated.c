/* Kernels in an emulated processor, for tests/emulated.py: reads addresses of requests, answers with their results.
 * The memory of both processes is one file, mapped at the same address. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int64_t RUN(const void *request);

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    void *base = (void *)(uintptr_t)strtoull(argv[2], NULL, 0);
    size_t size = strtoull(argv[3], NULL, 0);
    int file = open(argv[1], O_RDWR);
    if (file < 0 || mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != base) {
        perror("mapping the shared memory");
        return 1;
    }
    int64_t address;
    while (read(STDIN_FILENO, &address, sizeof address) == sizeof address) {
        int64_t result = RUN((const void *)(uintptr_t)address);
        if (write(STDOUT_FILENO, &result, sizeof result) != sizeof result) return 1;
    }
    return 0;
}
