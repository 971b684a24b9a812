//! The chart: the loads that the source has at one time, one panel per policy on the same axes.

use crate::drawing::{Area, Drawn, GRID, GROUND, INK, MUTED, bold, text};
use crate::latency::grouped;
use crate::options::Options;
use crate::policy::Policy;
use crate::report::{Findings, brief, millis};
use crate::simulate::Run;
use crate::source::{FASTEST, SHARES, TIME_OUT};
use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea;
use plotters::element::{PathElement, Polygon, Rectangle};
use plotters::style::text_anchor::HPos;
use plotters::style::{Color, RGBColor, ShapeStyle, WHITE};
use std::time::Duration;

const WIDTH: i32 = 1200;
const LEFT: i32 = 84;
const RIGHT: i32 = 924;
const NOTES: i32 = RIGHT + 22;
const NOTES_END: i32 = WIDTH - 36;

const PANELS_TOP: i32 = 136;
const PANEL_HEIGHT: i32 = 72;
/// Room above each panel for its caption.
const CAPTION: i32 = 34;
const PANELS_BOTTOM: i32 = PANELS_TOP + 7 * (PANEL_HEIGHT + CAPTION) - CAPTION;
const HEIGHT: i32 = PANELS_BOTTOM + 64;

const SILENCE: RGBColor = RGBColor(226, 229, 233);

fn color(policy: Policy) -> RGBColor {
    match policy {
        Policy::PlainTtl => RGBColor(207, 64, 27),
        Policy::Jitter => RGBColor(205, 124, 0),
        Policy::SingleFlight => RGBColor(130, 80, 196),
        Policy::XFetch => RGBColor(36, 104, 204),
        Policy::SoftTtl => RGBColor(0, 132, 158),
        Policy::KeepWarm => RGBColor(178, 56, 122),
        Policy::AllTogether => RGBColor(0, 135, 98),
    }
}

/// The SVG text.
pub(crate) fn draw(findings: &Findings, options: &Options) -> Result<String, crate::Error> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
        let axes = Axes::new(findings, options);
        area.fill(&WHITE)?;
        header(&area, &axes, findings, options)?;
        for (row, run) in (0..).zip(&findings.runs) {
            panel(&area, &axes, row, run, options)?;
        }
        time_axis(&area, &axes, options)?;
        area.present()?;
    }
    Ok(svg)
}

/// The scales that every panel shares.
struct Axes {
    length: Duration,
    /// The upper end of the scale of loads: beyond it panels are cut off.
    ceiling: u32,
}

impl Axes {
    /// The scale is that of the beats: the outage and the cold start may go beyond it.
    fn new(findings: &Findings, options: &Options) -> Self {
        let most = findings.runs.iter().map(|run| run.figures.most_concurrent_loads_before_outage).max();
        Axes { length: options.length(), ceiling: round_up(most.unwrap_or(0).max(options.servers)) }
    }

    fn x(&self, at: Duration) -> i32 {
        let share = (at.as_secs_f64() / self.length.as_secs_f64()).min(1.0);
        LEFT + (share * f64::from(RIGHT - LEFT)).round() as i32
    }

    /// The height of so many loads above a panel's lower edge.
    fn rise(&self, loads: u32) -> i32 {
        let share = f64::from(loads.min(self.ceiling)) / f64::from(self.ceiling);
        (share * f64::from(PANEL_HEIGHT)).round() as i32
    }
}

/// The next number of one digit, or of a digit and a half, and zeros.
fn round_up(number: u32) -> u32 {
    let power = 10_u32.pow(number.max(10).ilog10());
    let steps = [10, 15, 20, 30, 40, 50, 60, 80, 100];
    steps.into_iter().map(|step| step * (power / 10)).find(|step| number <= *step).unwrap_or(number)
}

fn header(area: &Area<'_>, axes: &Axes, findings: &Findings, options: &Options) -> Drawn {
    bold(area, (LEFT, 34), "The heartbeat of a plain TTL, and how it vanishes", 23, INK)?;
    let calls = findings.runs.first().map_or(0, |run| run.figures.calls);
    let setting = format!(
        "{} calls for {} keys (Zipf {}), TTL {} s. A source with {} servers: {} at best, a heavy tail, a time-out of {}.",
        grouped(calls),
        grouped(options.keys.into()),
        options.zipf,
        options.ttl,
        options.servers,
        brief(FASTEST),
        brief(TIME_OUT),
    );
    text(area, (LEFT, 64), &setting, 14, MUTED, HPos::Left)?;
    let caption = format!(
        "Loads at one time, cut off at {}. Above the dotted line they queue for a server.",
        grouped(axes.ceiling.into())
    );
    text(area, (LEFT, 86), &caption, 14, MUTED, HPos::Left)?;
    text(area, (NOTES, 86), "before: until the source falls silent", 13, MUTED, HPos::Left)
}

fn panel(area: &Area<'_>, axes: &Axes, row: i32, run: &Run, options: &Options) -> Drawn {
    let top = PANELS_TOP + row * (PANEL_HEIGHT + CAPTION);
    let bottom = top + PANEL_HEIGHT;
    let color = color(run.policy);
    let outage = options.outage();

    bold(area, (LEFT, top - 13), run.policy.name(), 15, color)?;
    text(area, (LEFT + 112, top - 13), run.policy.summary(), 13, MUTED, HPos::Left)?;

    area.draw(&Rectangle::new([(LEFT, top), (RIGHT, bottom)], GROUND.filled()))?;
    // It reaches up into the gap, where no load hides it.
    let silent = [(axes.x(outage.start), top - 5), (axes.x(outage.end), bottom + 5)];
    area.draw(&Rectangle::new(silent, SILENCE.filled()))?;
    for loads in [0, axes.ceiling / 2, axes.ceiling] {
        let y = bottom - axes.rise(loads);
        area.draw(&PathElement::new(vec![(LEFT, y), (RIGHT, y)], GRID))?;
        text(area, (LEFT - 8, y), &grouped(loads.into()), 12, MUTED, HPos::Right)?;
    }

    let mut outline = vec![(LEFT, bottom)];
    for (share, most) in (0..).zip(&run.most_loads) {
        let y = bottom - axes.rise(*most);
        let at = |share: u32| axes.x(axes.length * share / SHARES);
        outline.extend([(at(share), y), (at(share + 1), y)]);
    }
    outline.push((RIGHT, bottom));
    area.draw(&Polygon::new(outline.clone(), color.mix(0.3).filled()))?;
    area.draw(&PathElement::new(outline, ShapeStyle::from(color).stroke_width(1)))?;

    for at in [outage.start, outage.end] {
        let x = axes.x(at);
        area.draw(&PathElement::new(vec![(x, top), (x, bottom)], INK.mix(0.3)))?;
    }
    let servers = bottom - axes.rise(options.servers);
    for x in (LEFT..RIGHT).step_by(6) {
        area.draw(&PathElement::new(vec![(x, servers), (x + 2, servers)], INK.mix(0.6)))?;
    }

    let figures = &run.figures;
    let share = |calls: u64| percent(calls, figures.calls);
    let notes = [
        ("loads at once, before", grouped(figures.most_concurrent_loads_before_outage.into())),
        ("loads at once, ever", grouped(figures.most_concurrent_loads.into())),
        ("hard misses", share(figures.hard_misses)),
        ("p99 wait, before", millis(figures.p99_wait_before_outage_ms)),
        ("errors", share(figures.errors)),
    ];
    for (line, (name, value)) in (0..).zip(notes) {
        let y = top - 1 + line * 18;
        text(area, (NOTES, y), name, 13, MUTED, HPos::Left)?;
        text(area, (NOTES_END, y), &value, 13, INK, HPos::Right)?;
    }
    Ok(())
}

/// Three digits of a share, in per cent.
fn percent(part: u64, whole: u64) -> String {
    let percent = 100.0 * part as f64 / whole.max(1) as f64;
    match part {
        0 => "none".to_owned(),
        _ if percent < 0.995 => format!("{percent:.2} %"),
        _ => format!("{percent:.1} %"),
    }
}

fn time_axis(area: &Area<'_>, axes: &Axes, options: &Options) -> Drawn {
    let outage = options.outage();
    let y = PANELS_BOTTOM + 6;
    area.draw(&PathElement::new(vec![(LEFT, y), (RIGHT, y)], MUTED))?;
    let steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400];
    let step = steps.into_iter().find(|step| options.seconds / step <= 12).unwrap_or(14_400);
    for second in (0..=options.seconds).step_by(step as usize) {
        let x = axes.x(Duration::from_secs(second));
        area.draw(&PathElement::new(vec![(x, y), (x, y + 5)], MUTED))?;
        text(area, (x, y + 16), &second.to_string(), 12, MUTED, HPos::Center)?;
    }
    let middle = i32::midpoint(axes.x(outage.start), axes.x(outage.end));
    text(area, (middle, y + 40), "source silent", 13, INK, HPos::Center)?;
    text(area, (RIGHT, y + 40), "seconds since the start", 13, MUTED, HPos::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_ends_at_a_round_number_that_nothing_exceeds() {
        for (number, ceiling) in
            [(0, 10), (10, 10), (32, 40), (101, 150), (151, 200), (999, 1_000), (1_400, 1_500)]
        {
            assert_eq!(round_up(number), ceiling, "{number}");
        }
    }

    #[test]
    fn shares_have_the_digits_that_matter() {
        assert_eq!(
            [0, 1, 95, 1_234].map(|part| percent(part, 10_000)),
            ["none", "0.01 %", "0.95 %", "12.3 %"]
        );
    }
}
