//! The chart: latency over time, one strip per strategy on a shared log scale, and the queries below.

use crate::drawing::{Area, Drawn, GRID, GROUND, INK, MUTED, bold, text};
use crate::heartbeat::{Heartbeat, REQUESTS_PER_SECOND, Sample};
use crate::latency::{grouped, human};
use crate::options::Options;
use crate::report::Findings;
use crate::source::{Query, lanes};
use crate::strategy::{Kind, SOFT_TTL, TTL};
use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::element::{PathElement, Polygon, Rectangle};
use plotters::style::text_anchor::HPos;
use plotters::style::{Color, RGBColor, ShapeStyle, WHITE};
use std::time::{Duration, Instant};

const WIDTH: i32 = 1200;
const LEFT: i32 = 84;
const RIGHT: i32 = 944;
const NOTES: i32 = RIGHT + 22;

const STRIPS_TOP: i32 = 144;
const STRIP_HEIGHT: i32 = 90;
const STRIP_GAP: i32 = 24;

const QUERIES_TOP: i32 = STRIPS_TOP + 4 * (STRIP_HEIGHT + STRIP_GAP) + 44;
const LANE_HEIGHT: i32 = 36;
const LANE_GAP: i32 = 8;
const QUERIES_BOTTOM: i32 = QUERIES_TOP + 4 * (LANE_HEIGHT + LANE_GAP) - LANE_GAP;
const HEIGHT: i32 = QUERIES_BOTTOM + 62;

/// Points of one strip, each the slowest request of its share of the time.
const BINS: u32 = 480;
/// The lower end of the latency scale.
const FLOOR: f64 = 1e-6;

const LEGEND: [(Kind, &str); 4] = [
    (Kind::Naive, "naive: cache-aside, RwLock<HashMap>"),
    (Kind::Mutex, "mutex: one lock, held while it queries"),
    (Kind::Dashmap, "dashmap: cache-aside, DashMap"),
    (Kind::Quell, "quell: one flight, old answer meanwhile"),
];

fn color(kind: Kind) -> RGBColor {
    match kind {
        Kind::Naive => RGBColor(207, 64, 27),
        Kind::Mutex => RGBColor(130, 80, 196),
        Kind::Dashmap => RGBColor(217, 138, 0),
        Kind::Quell => RGBColor(0, 135, 98),
    }
}

/// The SVG text.
pub(crate) fn draw(findings: &Findings, options: &Options) -> Result<String, crate::Error> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
        let axes = Axes::new(findings, options);
        area.fill(&WHITE)?;
        header(&area, findings, options)?;
        for (row, beat) in (0..).zip(&findings.heartbeats) {
            strip(&area, &axes, row, beat)?;
        }
        queries(&area, &axes, &findings.heartbeats)?;
        time_axis(&area, &axes)?;
        area.present()?;
    }
    Ok(svg)
}

/// The scales that every panel shares.
struct Axes {
    length: Duration,
    /// The upper end of the latency scale, in seconds: a power of ten.
    ceiling: f64,
}

impl Axes {
    fn new(findings: &Findings, options: &Options) -> Self {
        let slowest = findings.heartbeats.iter().map(|beat| beat.max.as_secs_f64()).fold(1.0, f64::max);
        Axes {
            length: Duration::from_secs(options.seconds),
            ceiling: 10_f64.powi(slowest.log10().ceil() as i32),
        }
    }

    fn x(&self, at: Duration) -> i32 {
        let share = (at.as_secs_f64() / self.length.as_secs_f64()).min(1.0);
        LEFT + (share * f64::from(RIGHT - LEFT)).round() as i32
    }

    /// The height of a latency above a strip's lower edge.
    fn rise(&self, seconds: f64) -> i32 {
        let share = (seconds / FLOOR).log10() / (self.ceiling / FLOOR).log10();
        (share.clamp(0.0, 1.0) * f64::from(STRIP_HEIGHT)).round() as i32
    }

    /// The powers of ten from the floor to the ceiling, in seconds.
    fn decades(&self) -> impl Iterator<Item = f64> {
        let count = (self.ceiling / FLOOR).log10().round() as i32;
        (0..=count).map(|power| FLOOR * 10_f64.powi(power))
    }
}

fn header(area: &Area<'_>, findings: &Findings, options: &Options) -> Drawn {
    let alone = human(findings.alone);
    let title = format!("One hot key, one query of {alone}: what readers wait when the answer expires");
    bold(area, (LEFT, 34), &title, 23, INK)?;
    let setting = format!(
        "SQLite aggregate over {} rows. An answer is good for {} s; quell refreshes it from {} s on. \
         {} requests/s from {} thread{}.",
        grouped(crate::database::ROWS.into()),
        TTL.as_secs_f64(),
        SOFT_TTL.as_secs_f64(),
        grouped(REQUESTS_PER_SECOND.into()),
        options.heartbeat_threads,
        if options.heartbeat_threads == 1 { "" } else { "s" },
    );
    text(area, (LEFT, 64), &setting, 14, MUTED, HPos::Left)?;

    for (column, (kind, words)) in (0..).zip(LEGEND) {
        let x = LEFT + column * 272;
        area.draw(&Rectangle::new([(x, 86), (x + 12, 98)], color(kind).filled()))?;
        text(area, (x + 19, 92), words, 13, INK, HPos::Left)?;
    }
    let bin = human(Duration::from_secs(options.seconds) / BINS).replace(".0 ", " ");
    let caption = format!("Slowest request of each {bin}, log scale; shaded while a query runs");
    bold(area, (LEFT, 124), &caption, 14, INK)
}

fn strip(area: &Area<'_>, axes: &Axes, row: i32, beat: &Heartbeat) -> Drawn {
    let top = STRIPS_TOP + row * (STRIP_HEIGHT + STRIP_GAP);
    let bottom = top + STRIP_HEIGHT;
    let color = color(beat.kind);
    area.draw(&Rectangle::new([(LEFT, top), (RIGHT, bottom)], GROUND.filled()))?;
    for decade in axes.decades() {
        let y = bottom - axes.rise(decade);
        area.draw(&PathElement::new(vec![(LEFT, y), (RIGHT, y)], GRID))?;
        if (decade.log10().round() as i32) % 3 == 0 {
            let label = human(Duration::from_secs_f64(decade)).replace(".00", "");
            text(area, (LEFT - 8, y), &label, 12, MUTED, HPos::Right)?;
        }
    }
    for (from, to) in merged(beat.queries.iter().map(|query| span(axes, beat.start, query))) {
        area.draw(&Rectangle::new([(from, top), (to, bottom)], color.mix(0.12).filled()))?;
    }

    let mut line = Vec::new();
    for (from, to, slowest) in slowest_by_bin(&beat.samples, axes.length) {
        let y = bottom - axes.rise(slowest.as_secs_f64());
        line.extend([(axes.x(from), y), (axes.x(to), y)]);
    }
    if let (Some(first), Some(last)) = (line.first(), line.last()) {
        let mut outline = line.clone();
        outline.extend([(last.0, bottom), (first.0, bottom)]);
        area.draw(&Polygon::new(outline, color.mix(0.28).filled()))?;
        area.draw(&PathElement::new(
            line,
            ShapeStyle { color: color.to_rgba(), filled: false, stroke_width: 2 },
        ))?;
    }

    bold(area, (NOTES, top + 14), beat.kind.name(), 17, color)?;
    for (line, (name, value)) in (0..).zip([("p50", beat.p50), ("p99", beat.p99), ("max", beat.max)]) {
        let y = top + 38 + line * 19;
        text(area, (NOTES, y), name, 14, MUTED, HPos::Left)?;
        text(area, (NOTES + 106, y), &human(value), 14, INK, HPos::Right)?;
    }
    Ok(())
}

fn queries(area: &Area<'_>, axes: &Axes, beats: &[Heartbeat]) -> Drawn {
    bold(area, (LEFT, QUERIES_TOP - 20), "Queries running in the database", 14, INK)?;
    for (row, beat) in (0..).zip(beats) {
        let top = QUERIES_TOP + row * (LANE_HEIGHT + LANE_GAP);
        let color = color(beat.kind);
        area.draw(&Rectangle::new([(LEFT, top), (RIGHT, top + LANE_HEIGHT)], GROUND.filled()))?;
        text(area, (LEFT - 8, top + LANE_HEIGHT / 2), beat.kind.name(), 13, color, HPos::Right)?;
        let most = (beat.most_at_once as i32).max(4);
        let spare = (most - beat.most_at_once as i32) * LANE_HEIGHT / most / 2;
        for (query, lane) in beat.queries.iter().zip(lanes(&beat.queries)) {
            let (from, to) = span(axes, beat.start, query);
            let upper = top + spare + lane as i32 * LANE_HEIGHT / most;
            let lower = (top + spare + (lane as i32 + 1) * LANE_HEIGHT / most - 1).max(upper + 1);
            area.draw(&Rectangle::new([(from, upper), (to, lower)], color.filled()))?;
        }
        let noun = if beat.queries.len() == 1 { "query" } else { "queries" };
        let note = format!("{} {noun}, at most {} at once", beat.queries.len(), beat.most_at_once);
        text(area, (NOTES, top + LANE_HEIGHT / 2), &note, 14, INK, HPos::Left)?;
    }
    Ok(())
}

fn time_axis(area: &Area<'_>, axes: &Axes) -> Drawn {
    let seconds = axes.length.as_secs();
    let step =
        [1, 2, 5, 10, 15, 30, 60, 120, 300, 600].into_iter().find(|step| seconds / step <= 12).unwrap_or(600);
    area.draw(&PathElement::new(vec![(LEFT, QUERIES_BOTTOM + 6), (RIGHT, QUERIES_BOTTOM + 6)], MUTED))?;
    for second in (0..=seconds).step_by(step as usize) {
        let x = axes.x(Duration::from_secs(second));
        area.draw(&PathElement::new(vec![(x, QUERIES_BOTTOM + 6), (x, QUERIES_BOTTOM + 11)], MUTED))?;
        text(area, (x, QUERIES_BOTTOM + 22), &second.to_string(), 12, MUTED, HPos::Center)?;
    }
    let middle = i32::midpoint(LEFT, RIGHT);
    text(area, (middle, QUERIES_BOTTOM + 44), "seconds since the start", 13, MUTED, HPos::Center)
}

/// A query's horizontal extent, at least two pixels wide.
fn span(axes: &Axes, start: Instant, query: &Query) -> (i32, i32) {
    let from = axes.x(query.began - start);
    let to = query.ended.map_or(RIGHT, |ended| axes.x(ended - start));
    (from, to.max(from + 2).min(RIGHT))
}

/// The union of spans that are given in the order of their beginnings.
fn merged(spans: impl Iterator<Item = (i32, i32)>) -> Vec<(i32, i32)> {
    let mut union: Vec<(i32, i32)> = Vec::new();
    for (from, to) in spans {
        match union.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => union.push((from, to)),
        }
    }
    union
}

/// The bins in which a request fell due, each with its bounds and its slowest request.
fn slowest_by_bin(samples: &[Sample], length: Duration) -> Vec<(Duration, Duration, Duration)> {
    let width = length / BINS;
    let mut slowest = vec![None; BINS as usize];
    for sample in samples {
        let bin = (sample.due.as_nanos() / width.as_nanos()) as usize;
        if let Some(worst) = slowest.get_mut(bin) {
            *worst = (*worst).max(Some(sample.latency));
        }
    }
    let bins = (0..).zip(slowest);
    bins.filter_map(|(bin, worst)| Some((width * bin, width * (bin + 1), worst?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_spans_are_shaded_once() {
        let spans = [(0, 10), (2, 5), (10, 12), (20, 21)];
        assert_eq!(merged(spans.into_iter()), [(0, 12), (20, 21)]);
    }

    #[test]
    fn a_bin_keeps_its_slowest_request_and_an_empty_one_is_left_out() {
        let length = Duration::from_millis(10) * BINS;
        let sample = |due, latency| Sample {
            due: Duration::from_millis(due),
            latency: Duration::from_micros(latency),
        };
        let samples = [sample(1, 5), sample(9, 7), sample(2, 3), sample(35, 1)];
        let ms = Duration::from_millis;
        let us = Duration::from_micros;
        assert_eq!(slowest_by_bin(&samples, length), [(ms(0), ms(10), us(7)), (ms(30), ms(40), us(1))]);
    }
}
