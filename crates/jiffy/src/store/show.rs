//! Output of the `jiffy store` commands as text.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many chunks.
//! A *lease* protects the objects of an upload in progress from a garbage collection. A *tenant* is
//! an owner of snapshots in the store.

use super::{Figures, OfTenant, Verified};
use crate::columns::{Align, Table};
use crate::template::mib;
use jiffy_client::terminal::line;
use jiffy_store::{DamagedSnapshot, GcReport, TenantKeys, Traffic};

/// Prints the results of garbage collections. Marked objects are unused, and a later collection may
/// remove them. Readers are hosts that still have to fetch a part of a snapshot.
pub fn gc(collected: &[OfTenant<GcReport>], dry_run: bool, traffic: &Traffic) {
    let mut table = Table::new([
        ("TENANT", Align::Left),
        ("LIVE", Align::Right),
        ("MARKED", Align::Right),
        ("REMOVED", Align::Right),
        ("FREED", Align::Right),
        ("REWRITTEN PACKS", Align::Right),
        ("LEASES", Align::Right),
        ("READERS", Align::Right),
    ]);
    for OfTenant { tenant, result } in collected {
        table.row([
            tenant.clone(),
            result.live.to_string(),
            result.condemned.to_string(),
            result.removed.to_string(),
            mib(result.removed_bytes),
            result.repacked.to_string(),
            result.leases.to_string(),
            result.readers.to_string(),
        ]);
    }
    out!("{}", table.text());
    if dry_run {
        outln!("dry run: nothing was changed");
    }
    requests(traffic);
}

/// Prints the results of verifications. `is_complete` is false if tenants were skipped because
/// their names are damaged.
pub fn verified(verified: &[OfTenant<Verified>], is_complete: bool, traffic: &Traffic) {
    for OfTenant { tenant, result } in verified {
        let report = &result.report;
        outln!(
            "tenant {}: {} snapshots, {} chunks, {} read",
            line(tenant),
            report.snapshots,
            report.chunks,
            mib(report.bytes)
        );
        for object in &report.objects {
            outln!(
                "damaged  {}: {}",
                line(&object.object),
                line(&object.reason)
            );
        }
        for snapshot in &report.damaged {
            chunks("damaged ", snapshot);
        }
        for snapshot in result.unrepaired.iter().flatten() {
            chunks("not repaired", snapshot);
        }
        let count = |snapshot: &DamagedSnapshot| snapshot.chunks.len();
        let damaged: usize = report.damaged.iter().map(count).sum();
        let unrepaired: usize = result.unrepaired.iter().flatten().map(count).sum();
        if result.unrepaired.is_some() && !report.damaged.is_empty() {
            outln!(
                "repaired {} of {damaged} damaged chunks",
                damaged.saturating_sub(unrepaired)
            );
        }
    }
    let is_sound = verified.iter().all(|verified| verified.result.is_sound());
    if is_sound && is_complete {
        outln!("no damage found");
    }
    requests(traffic);
}

/// Prints a line for each damaged chunk of a snapshot.
fn chunks(word: &str, snapshot: &DamagedSnapshot) {
    for chunk in &snapshot.chunks {
        outln!(
            "{word} snapshot {} {} chunk {}: {} ({})",
            line(&snapshot.id),
            line(&chunk.part),
            chunk.chunk,
            line(&chunk.reason.to_string()),
            line(&chunk.pack.to_string())
        );
    }
}

/// Prints the results of key rotations. A generation is a set of data keys with its own secret. The
/// secrets were encrypted again with the current master key.
pub fn rotated(rotated: &[OfTenant<TenantKeys>], traffic: &Traffic) {
    let mut table = Table::new([
        ("TENANT", Align::Left),
        ("REWRAPPED SECRETS", Align::Right),
        ("GENERATION", Align::Right),
    ]);
    for OfTenant { tenant, result } in rotated {
        table.row([
            tenant.clone(),
            result.rewrapped.to_string(),
            result.generation.to_string(),
        ]);
    }
    out!("{}", table.text());
    requests(traffic);
}

/// Prints statistics.
pub fn stats(figures: &[OfTenant<Figures>], traffic: &Traffic) {
    let mut table = Table::new([
        ("TENANT", Align::Left),
        ("SNAPSHOTS", Align::Right),
        ("CHUNKS", Align::Right),
        ("PACKS", Align::Right),
        ("LOGICAL", Align::Right),
        ("UNIQUE", Align::Right),
        ("STORED", Align::Right),
        ("DEDUPLICATION", Align::Right),
        ("COMPRESSION", Align::Right),
    ]);
    let mut total = Figures::default();
    for OfTenant { tenant, result } in figures {
        total.usage.add(&result.usage);
        total.stats.snapshots += result.stats.snapshots;
        total.stats.packs += result.stats.packs;
        total.stats.pack_bytes += result.stats.pack_bytes;
        total.stats.manifest_bytes += result.stats.manifest_bytes;
        row(&mut table, tenant.clone(), result);
    }
    row(&mut table, "all".to_owned(), &total);
    out!("{}", table.text());
    requests(traffic);
}

/// Adds the statistics of a tenant to the table.
fn row(table: &mut Table, name: String, figures: &Figures) {
    let Figures { stats, usage, .. } = figures;
    table.row([
        name,
        stats.snapshots.to_string(),
        usage.chunks.to_string(),
        stats.packs.to_string(),
        mib(usage.snapshot_bytes),
        mib(usage.chunk_bytes),
        mib(stats.pack_bytes + stats.manifest_bytes),
        format!("{:.2}", usage.deduplication()),
        format!("{:.2}", usage.compression()),
    ]);
}

/// Prints the number of requests to the store, which may be charged.
fn requests(traffic: &Traffic) {
    outln!(
        "requests: {} gets, {} puts, {} heads, {} lists, {} deletes; {} read, {} written",
        traffic.gets,
        traffic.puts,
        traffic.heads,
        traffic.lists,
        traffic.deletes,
        mib(traffic.bytes_read),
        mib(traffic.bytes_written)
    );
}
