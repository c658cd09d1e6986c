// Guest kernel that attacks its VMM: it executes a script from its initial ramdisk and resets the
// machine. It uses no library, and has the 64-bit entry of Linux.
// crates/engines/tests/hostile_driver.rs writes the scripts.
#include <stdint.h>

// Kinds of steps. `ASK` writes `F` to the serial port if a value in memory has a bit of the mask,
// and `.` otherwise.
enum { END, STORE, LOAD, OUT, COPY, ASK };

struct step {
    uint8_t what;
    // Bytes of an access: 1, 2, 4 or 8.
    uint8_t width;
    uint16_t port;
    uint32_t address;
   // Stored value. For `COPY`: offset in the ramdisk (low half) and bytes (high half). For `ASK`:
    // a mask.
    uint64_t value;
};

// Linux's entry has the address of `boot_params` in RSI.
__asm__(".globl _start\n_start: mov %rsi, %rdi\n jmp obey\n");

static void out(uint16_t port, uint8_t value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port) : "memory");
}

static void store(const struct step *step)
{
    uintptr_t at = step->address;
    switch (step->width) {
    case 1: *(volatile uint8_t *)at = (uint8_t)step->value; break;
    case 2: *(volatile uint16_t *)at = (uint16_t)step->value; break;
    case 4: *(volatile uint32_t *)at = (uint32_t)step->value; break;
    default: *(volatile uint64_t *)at = step->value; break;
    }
}

static uint64_t load(const struct step *step)
{
    uintptr_t at = step->address;
    switch (step->width) {
    case 1: return *(volatile uint8_t *)at;
    case 2: return *(volatile uint16_t *)at;
    case 4: return *(volatile uint32_t *)at;
    default: return *(volatile uint64_t *)at;
    }
}

static void copy(const struct step *step, const uint8_t *ramdisk)
{
    void *to = (void *)(uintptr_t)step->address;
    const void *from = ramdisk + (uint32_t)step->value;
    uint64_t words = (step->value >> 32) / 8;
    __asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
}

__attribute__((used, noreturn)) void obey(const uint8_t *boot_params)
{
    // struct setup_header: ramdisk_image (Linux, Documentation/arch/x86/boot.rst).
    const uint8_t *ramdisk = (const uint8_t *)(uintptr_t)*(const uint32_t *)(boot_params + 0x218);
    const struct step *step = (const struct step *)ramdisk;
    for (; step->what != END; step++) {
        switch (step->what) {
        case STORE: store(step); break;
        case LOAD: load(step); break;
        case OUT: out(step->port, (uint8_t)step->value); break;
        case COPY: copy(step, ramdisk); break;
        case ASK: out(0x3f8, load(step) & step->value ? 'F' : '.'); break;
        }
    }
    out(0x3f8, 'E');
    // The keyboard controller's reset line.
    out(0x64, 0xfe);
    for (;;)
        __asm__ volatile("hlt");
}
